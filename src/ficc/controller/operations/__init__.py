"""Use cases: each checks authority, reads, decides by `ficc.domain`, and writes under a guard."""
