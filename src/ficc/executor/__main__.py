"""`python -m ficc.executor [STATE_DIRECTORY]`: how `ficc up` starts an executor."""

from ficc.executor.main import main

main()
