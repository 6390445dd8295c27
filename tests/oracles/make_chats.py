"""Conversations rendered and encoded by transformers' own tokenizer: writes chats.json.

    pip install transformers; python tests/oracles/make_chats.py TOKENIZER.json

The templates are ours, and use what templates of published models use. TOKENIZER.json is the tokenizer of
tests/support/serving_echo.py:
``python -c "from tests.support import serving_echo; print(serving_echo.tokenizer().definition)"``.
Nothing of rooftop is imported, and nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers

HERE = Path(__file__).parent
USER = {"role": "user", "content": 'Größe <b>&</b> "日本" 🙂\n  two'}
TALK = [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "ok"}, USER]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [True, None, 2.5]}}}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds <two>",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
TEMPLATES = {
    "turns": "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
    "blocks": "{%- for m in messages %}\n    {%- if m.role == 'system' -%}\n        {{- '[' + m.content + ']' }}\n"
    "    {% else %}\n    {{ m.role | upper }}: {{ m.content }}\n    {% endif %}\n{% endfor %}\n{{- eos_token }}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}\n"
    "{{ t.function | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "({{ c.function.arguments | tojson }}){% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
    "loops": "{% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}"
    "{% if loop.first and m.role == 'system' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n > 2 %}{% break %}{% endif %}{{ ns.n }}{{ m.content[:4] }}{{ loop.last }}{% endfor %}"
    "{{ messages[::-1][0].role }}{{ messages | map(attribute='role') | list }}",
    "absent": "{% for m in messages %}{{ m.content is defined }}{{ m.name is defined }}"
    "{{ m.get('name', 'none') }}{% endfor %}{{ documents is none }}{{ tools is none }}{{ unknown is defined }}",
    "macro": "{% macro turn(m) %}<{{ m.role }}|{{ m.content }}>{% endmacro %}{% for m in messages %}"
    "{{ turn(m) }}{% endfor %}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
}
CASES: dict[str, dict[str, Any]] = {
    "talk": {"messages": TALK},
    "call": {"messages": [USER, CALL, {"role": "tool", "content": "3", "tool_call_id": "1"}], "tools": TOOLS},
    "named": {"messages": [{**USER, "name": "Ann"}]},
}
#: A template needs content that is text.
SKIPPED = {("turns", "call"), ("generation", "call"), ("loops", "call")}


def main() -> None:
    """Write chats.json."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=sys.argv[1], bos_token="<|endoftext|>", eos_token="<|end|>"
    )
    chats = []
    for template_name, template in TEMPLATES.items():
        for case_name, case in CASES.items():
            if (template_name, case_name) in SKIPPED:
                continue
            text, ids = (
                tokenizer.apply_chat_template(
                    case["messages"], tools=case.get("tools"), chat_template=template, add_generation_prompt=True,
                    tokenize=tokenize, **({"return_dict": False} if tokenize else {}),
                )
                for tokenize in (False, True)
            )  # fmt: skip
            chats.append({"template": template_name, "case": case_name, "text": text, "ids": ids})
    document = {"templates": TEMPLATES, "cases": CASES, "made": chats}
    lines = [f' "made_with": "transformers {transformers.__version__}"']
    for key, values in document.items():
        named = values.items() if isinstance(values, dict) else ((None, value) for value in values)
        rows = [f"  {'' if name is None else json.dumps(name) + ': '}{_line(value)}" for name, value in named]
        opening, closing = "{}" if isinstance(values, dict) else "[]"
        lines.append(f' "{key}": {opening}\n' + ",\n".join(rows) + f"\n {closing}")
    (HERE / "chats.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
