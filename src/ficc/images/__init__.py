"""Runtime images: OCI layouts read and proven, extracted into a store, written, and built on this machine.

`store.ImageStore` is what the executor asks; `build` makes the images that ficc ships recipes for.
"""
