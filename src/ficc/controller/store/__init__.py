"""What the controller keeps: tables, transactions, and one module of reads and writes per subject."""
