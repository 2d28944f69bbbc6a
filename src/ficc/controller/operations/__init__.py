"""What the controller does, and what it knows in memory.

Use cases check authority, read, decide by `ficc.domain` and write under a guard. Beside them are the two tables that
requests are judged by without asking the database, who may do what (`authority`) and what is served where
(`routes`), and the work on content, which goes on in threads. `ports` says what they need of the parts above them.
"""
