"""Links between the processes of one system: addresses, the secret they share, and bounded sockets."""
