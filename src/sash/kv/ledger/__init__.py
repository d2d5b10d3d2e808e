"""Who owns which page: pools, page tables and their books. Integers only; never imports torch."""
