"""`python -m ficc.controller [STATE_DIRECTORY]`: how `ficc up` starts a controller."""

from ficc.controller.main import main

main()
