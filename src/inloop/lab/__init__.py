"""What experiments need and the library does not: data, networks, runs."""
