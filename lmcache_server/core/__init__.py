"""What is decided: which bytes are whose, who may read them, what goes when space is short.

Plain state and plain calls: no await, no lock, no clock (`now` is an argument, in seconds), no I/O, no logging. One
thread owns it all. The parts do not know each other; `l1_cache` joins them.
"""
