"""An app that ``langgraph dev`` serves; see README.md."""
