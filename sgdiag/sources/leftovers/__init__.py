"""What dead servers leave behind: processes, ports, shared memory."""
