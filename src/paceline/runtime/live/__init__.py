"""The live runtime: real processes, control messages over Unix sockets, tensors in shared memory."""
