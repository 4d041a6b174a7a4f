"""The host side: queues, pages, slots, decisions, launches, late results. The only mutable objects."""
