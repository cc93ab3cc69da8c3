"""Access to the server: connection, stream API, message reader, pull requests, PubAcks."""
