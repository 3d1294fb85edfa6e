"""What reports and the console look like: one style sheet, the parts of a page, pictures."""
