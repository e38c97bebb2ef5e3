"""The blocks of nets, and the rewriting of their graphs."""
