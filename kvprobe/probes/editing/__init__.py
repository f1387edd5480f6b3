"""What an edit of a cached prompt does and costs: section 4 of the paper."""
