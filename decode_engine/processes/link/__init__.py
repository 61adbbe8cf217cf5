"""The link: how doors speak to an engine in another process, over a socket."""
