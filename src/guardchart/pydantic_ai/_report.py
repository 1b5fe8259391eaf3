"""What a guard cannot police of an agent, said at the start."""

from __future__ import annotations

from typing import Any

from pydantic_ai.toolsets import FunctionToolset

from guardchart.pydantic_ai._arguments import probed

__all__ = ["unpoliced"]


def unpoliced(agent: Any, *, native: str) -> list[str]:
    """Return one sentence for each thing that a guard of this agent cannot police.

    Args:
        agent: the agent, as far as it is known when it is built.
        native: what happens to the provider's own tools: ``deny`` or ``allow``.
    """
    out = []
    root = getattr(agent, "root_capability", None)
    native_tools = [] if root is None else root.get_native_tools()
    own = [each for each in native_tools if getattr(each, "kind", "") != "tool_search"]
    if own:
        kinds = sorted({getattr(each, "kind", type(each).__name__) for each in own})
        said = "are left out" if native == "deny" else "run at the provider, unchecked"
        out.append(f"native tools {', '.join(kinds)} {said}")
    schema = getattr(agent, "_output_schema", None)
    processors = getattr(getattr(schema, "toolset", None), "processors", {})
    for name, processor in processors.items():
        if _calls(processor):
            out.append(f"output function of {name!r} runs without approval")
    text = getattr(schema, "text_processor", None)
    if text is not None and _calls(text):
        out.append("a text output function runs without approval")
    for toolset in getattr(agent, "toolsets", ()):
        found: list[Any] = []
        toolset.apply(found.append)
        for leaf in found:
            if isinstance(leaf, FunctionToolset):
                out.extend(_open(leaf))
            else:
                out.append(f"{leaf.label}: its tools are known when it is asked, not before")
    return out


def _calls(processor: Any) -> bool:
    return getattr(processor, "_function_schema", None) is not None


def _open(toolset: Any) -> list[str]:
    out = []
    for name, tool in toolset.tools.items():
        if probed(tool.function_schema.validator, tool.tool_def.parameters_json_schema)[0]:
            out.append(f"tool {name!r} takes undeclared arguments; its JSON Schema decides")
    return out
