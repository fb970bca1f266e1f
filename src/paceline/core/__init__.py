"""The pure core: facts in, orders out. No torch, no sockets, no clock. Start with events, actions, machine."""
