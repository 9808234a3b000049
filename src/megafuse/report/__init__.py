"""Reports for people (terminal, Markdown, HTML) from records; measures nothing."""
