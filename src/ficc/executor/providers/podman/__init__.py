"""The podman provider: the same sandboxes, made by podman's command line.

`provider` is the provider, `sandbox` one container, `engine` runs podman, `arguments` are what it is told,
`probe` finds out whether it works here. `stage` and `monitor` are programs of their own, which import this
package with nothing but the standard library: it stays empty.
"""
