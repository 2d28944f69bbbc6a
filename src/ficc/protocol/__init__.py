"""Bytes to messages and back, without IO."""
