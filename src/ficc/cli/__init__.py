"""The command line: it starts the processes, and is a client of the public API. What concerns this machine alone it
does itself: `ficc runtime` works on the executor's image store, and `ficc model add` may put a file into the content
store's incoming directory, from where the API adopts it."""
