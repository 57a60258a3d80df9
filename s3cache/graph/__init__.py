"""May this graph be cached, and under which key: pure, synchronous, in process."""
