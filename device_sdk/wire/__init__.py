"""The protocol between a device and the aggregator: everything both ends must agree on.

Every module here is *sans-io*: functions and small state objects over bytes. Sockets, files of
state, clocks and randomness come from the caller. Anything a peer can get wrong is refused with
:class:`device_sdk.wire.codec.errors.WireError`; no other exception may escape for hostile bytes.
"""
