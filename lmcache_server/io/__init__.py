"""What is done: sockets, shared memory, timers. Decides nothing; what to do comes in as callables."""
