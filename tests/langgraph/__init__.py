"""The LangGraph bridge."""
