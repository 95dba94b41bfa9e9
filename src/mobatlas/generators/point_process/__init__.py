"""The point process: a generator that tells when as well as where, with arrivals and stays for every visit."""
