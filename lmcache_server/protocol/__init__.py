"""What is said: messages, their encoding, keys and layouts. No I/O here; the server, the SDK and the connector share
it.
"""
