"""Recovery of group means M from composition P, aggregates V and numbers of people n."""
