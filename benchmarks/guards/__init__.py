"""Every guard of the shared cache as a named entry: what it looks like, what the code is without it, what it protects, who notices."""
