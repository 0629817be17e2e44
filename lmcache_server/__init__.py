"""The KV cache server: one pool of shared memory per node, addressed by token ids.

Folders, outside in: `cli` (what a person types), `app` (what is built, in which order), `service` (what a message
does), `io` (what is done), `core` (what is decided), `protocol` (what is said). Nothing here imports torch.
"""

__version__ = "0.1.0"
