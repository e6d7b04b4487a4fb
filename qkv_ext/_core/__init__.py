"""What the public modules share: options, problems, checks, the dispatch, and what computes."""
