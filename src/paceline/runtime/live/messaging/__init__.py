"""How messages get from process to process: Unix sockets within a host, TCP between hosts.

`unix_sockets.py` has the listeners and links of one host, `remote_links.py` those between hosts, over a `Transport`
(`transport.py`): `tcp_transport.py`, with keys or without.

A link carries messages whole and in order while its connection lasts. When it breaks, nobody can tell which of the last
messages arrived. There are two kinds of traffic, and each has one way to deal with that.

**Streams** of messages, each of which matters and none of which is answered, have a `ReliableChannel`
(`reliable_channel.py`): sequence numbers, acknowledgements, retransmission, deduplication by number. There are two:
between an agent and the driver (`multihost/driver_connection.py` has the agent's end), and between peers of different
hosts (`peer/`). Both ends live as long as the channel; if one of them is replaced, so is the channel, and its session
id keeps the old one's messages out.

**Requests** of a worker to a server (`worker/server_connections.py`) have no channel, because the protocol itself has
all that one would add. A worker has one request per server on its way, the `Exchange` of an iteration, and repeats it
until the server's `Parameters` come: the answer is the acknowledgement. (iteration, attempt) is the sequence number. A
server ignores a gradient whose iteration it has had, and answers a repeated pull with the answer it gave before
(`server/remote_workers.py`, which must decide this before it writes into the memory an answer may still leave from; on
one host the machine decides alone, `core/shard.py`). A channel could not replace this, only repeat it below. A server
that is restarted has forgotten every channel, but knows from its checkpoint or log which iterations have counted, and
workers repeat to its next incarnation what was not answered, over Unix sockets too. In place of a session id an
envelope names the run and the server's incarnation (`protocol/envelope.py`).

Frames are never copied for a retransmission. A gradient stays in the worker's segment until the answer has come, as a
peer's parameters stay in their slot until the neighbour has acknowledged them.
"""
