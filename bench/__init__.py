"""What the relay costs: measured against a direct connection to the same engine, in one run.

    python -m bench [NAME …]

CPU per unit of work and ratios within a run say something on a shared machine; absolute times say little.
"""
