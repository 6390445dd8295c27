"""The engine: its step loop, the replica on the devices, and the requests that it runs."""
