"""The LangChain bridge, on real objects of langchain, langgraph, langchain-core and langsmith."""
