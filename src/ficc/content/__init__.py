"""The content store: blobs by SHA-256, and the partials they grow from.

Layout below one directory, which several controllers may share:

    blobs/ab/abcd…    published: complete, hashed, mode 0444, never modified or truncated
    partials/PROJECT/abcd…   growing: one writer at a time; only its recorded offset counts
    incoming/         where the command line on this machine puts files for adoption
    bin/              given up; to be freed by whoever comes by

Physical names come from checked digests only. Bringing, disk goes before database; removing, database before
disk. A crash leaves a file without a row, which the sweeper removes, never a row that points at nothing.
"""
