"""Which plan to take: the search, what each costs, why the others lost."""
