"""The client: take cached KV out of a server, edit it, put it back. Needs torch; knows no web framework or engine."""
