"""The live runtime: real processes, control messages over ZeroMQ, tensors in shared memory."""
