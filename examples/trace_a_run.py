"""What an agent did and cost: JSON lines, OpenTelemetry spans, totals and a recording.

    python -m examples.trace_a_run [folder]

Offline: the model is a script. The spans are printed from memory; an app configures an OTLP
exporter instead, and nothing else changes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from guardchart import InspectorPlugin, JsonLinesSink, read_recording
from guardchart.agents import AgentTracePlugin, FakeModel, run_agent_sync, tool_registry


def delivery_date(order_id: int) -> str:
    """When an order will arrive."""
    return f"order {order_id} arrives on Friday"


SCRIPT = [
    {
        "tool": "delivery_date",
        "args": {"order_id": 42},
        "usage": {"input_tokens": 120, "output_tokens": 18, "cost_usd": 0.0004},
    },
    {
        "text": "It arrives on Friday.",
        "usage": {"input_tokens": 160, "output_tokens": 7, "cost_usd": 0.0005},
    },
]


def main(folder: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    trace = AgentTracePlugin(folder / "trace.jsonl", on_span="otel", tracer_provider=provider)
    with JsonLinesSink(folder / "run.jsonl") as sink:
        run_agent_sync(
            FakeModel(SCRIPT, is_async=False),
            tools=tool_registry(delivery_date),
            prompt="When does order 42 arrive?",
            plugins=[trace, InspectorPlugin(sink)],
        )
    trace.close()

    print("trace.jsonl")
    for line in (folder / "trace.jsonl").read_text().splitlines():
        record = json.loads(line)
        shown = record.get("gen_ai.tool.name") or record.get("gen_ai.request.model") or ""
        print(f"  {record['kind']:<12} {','.join(record['state']):<28} {shown}")
    print("spans")
    for span in exporter.get_finished_spans():
        print(f"  {span.name}")
    print("recording")
    for message in read_recording(folder / "run.jsonl"):
        print(f"  {message['type']:<18} {message.get('event', {}).get('type', '')}")
    total = trace.totals()["total"]
    print(f"total: {total['turns']} turns, {total['cost_usd']:.4f} USD")
    provider.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
