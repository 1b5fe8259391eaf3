"""A small LangGraph support graph whose one risky node is a statechart."""
