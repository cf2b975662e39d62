"""Small chat templates in the style of published model families, and the form that each of them expects.

The attacks in templates.py use them, and the chat templates that transformers contains.
"""

# ruff: noqa: E501 - lines of templates
from __future__ import annotations

import ast
from pathlib import Path

import transformers

from tcdeploy.host.python_source import parse_source
from tcdeploy.text.template_form import TemplateForm

CALLS_AS_JSON = """{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}"""
TEXT_OF_PARTS = """{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% elif p['type'] == 'image' %}<image>{% endif %}{% endfor %}"""
TOOLS = "{% if tools %}[tools]{% for t in tools %}{{ t | tojson }}{% endfor %}[/tools]{% endif %}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
ALTERNATES = """{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"""
NO_CALLS = frozenset({"tool call", "tool result"})
NO_INSTRUCTIONS = frozenset({"system", "developer"})

TEMPLATES = {
    # the role of each message in its header, calls as JSON
    "chatml": TOOLS + "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}" + CALLS_AS_JSON + "{% endif %}</end>\n{% endfor %}" + OPEN,
    # one branch for each role, results inside a user turn, reasoning of earlier turns dropped
    "branches": TOOLS + "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</end>{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<{{ m.role }}>{{ m.content }}</end>{% elif m.role == 'assistant' %}<assistant>"
    "{{ m.content.split('</think>')[-1] }}{% if m.tool_calls %}" + CALLS_AS_JSON + "{% endif %}</end>"
    "{% elif m.role == 'tool' %}<user><tool_response>{{ m.content }}</tool_response></end>{% endif %}{% endfor %}" + OPEN,
    # one call for each message, results as JSON
    "one call": TOOLS + "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('only one call at once') }}{% endif %}{% set c = m.tool_calls[0].function %}"
    """<assistant>{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}</end>"""
    "{% elif m.role == 'tool' or m.role == 'ipython' %}<ipython>{{ m.content | tojson }}</end>"
    "{% else %}<{{ m.role }}>{{ m.content | trim }}</end>{% endif %}{% endfor %}" + OPEN,
    # no system message, alternation, "model" for the assistant
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ 'model' if m.role == 'assistant' else m.role }}>"
    "{{ m.content | trim }}</end>{% endfor %}" + OPEN,
    # the first system message becomes part of the first user message, and roles alternate
    "system in user": ALTERNATES + "{% set first = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ first if loop.index0 < 2 }}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}",
    # the system message before the last user message, ids of nine characters, calls as a list
    "system last": "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{% if loop.last or rest[loop.index:] | selectattr('role', 'eq', 'user')"
    " | list | length == 0 %}" + TOOLS + "[INST] {% if system is defined %}{{ system + '\\n\\n' }}{% endif %}"
    "{% else %}[INST] {% endif %}{{ m.content + ' [/INST]' }}"
    "{% elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}"""
    "{{ ', ' if not loop.last }}{% endfor %}]</s>{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
    "{% elif m.role in ['tool', 'tool_results'] %}[TOOL_RESULTS] {{ {'content': m.content, 'call_id': m.tool_call_id}"
    " | tojson }}[/TOOL_RESULTS]{% else %}{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}{% endfor %}",
    # calls only of messages whose content is none, arguments concatenated
    "none before calls": "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<User>{{ m['content'] }}{% elif m['role'] == 'assistant' and m['content'] is none %}"
    "<Assistant><calls>{% for c in m['tool_calls'] %}{{ c['type'] + '<sep>' + c['function']['name'] + '\\n```json\\n'"
    " + c['function']['arguments'] + '\\n```' }}{% endfor %}</calls>{% elif m['role'] == 'assistant' %}<Assistant>"
    "{{ m['content'].split('</think>')[-1] }}</end>{% elif m['role'] == 'tool' %}<output>{{ m['content'] }}</output>"
    "{% endif %}{% endfor %}" + OPEN,
    # content tested for none inside the loop over calls, arguments concatenated
    "concatenated": "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}<Assistant>"
    "{{ m.content or '' }}{% for c in m.tool_calls %}{{ '<call>' + c.function.name + '<sep>' + c.function.arguments }}"
    "{% endfor %}</end>{% elif m.role == 'tool' %}<output>{{ m.content }}{% elif m.role in ['system', 'user', 'assistant'"
    "] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}" + OPEN,
    "printed": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments }}{% endfor %}{% endfor %}" + OPEN,
    # one tag for each argument
    "items": TOOLS + "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content | trim }}{% endif %}{% for c in m.tool_calls or [] %}"
    "<function={{ c.function.name }}>{% for name, value in c.function.arguments | items %}<parameter={{ name }}>"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value }}</parameter>"
    "{% endfor %}</function>{% endfor %}{% elif m.role == 'tool' %}<response>{{ m.content }}</response>"
    "{% else %}{{ raise_exception('unexpected role') }}{% endif %}{% endfor %}" + OPEN,
    # calls as Python
    "pythonic": "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% if m.tool_calls %}["
    "{% for c in m.tool_calls %}{{ c.function.name }}({% for name, value in c.function.arguments.items() %}"
    "{{ name }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
    "{% endif %}{% endfor %}" + OPEN,
    # calls only of messages without the key `content`
    "no content": "{% for m in messages %}<{{ m.role }}>{% if 'content' in m %}{{ m['content'] }}{% else %}"
    "{% for c in m['tool_calls'] %}{{ c['function'] | tojson }}{% endfor %}{% endif %}{% endfor %}" + OPEN,
    # vision models: content is a list of parts
    "parts": "{% for m in messages %}{{ m['role'].upper() }}: " + TEXT_OF_PARTS + "\n{% endfor %}" + OPEN,
    "parts by filter": "{% for m in messages %}{% if m.role != 'system' %}{{ m.role.upper() + ': ' }}{% endif %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p['text'] + ' ' }}{% endfor %}{% endfor %}" + OPEN,
    "first part": "{% for m in messages %}<{{ m.role | capitalize }}>{% if m.content[0]['type'] == 'image' %}<image>"
    "{% else %}{{ m.content[0]['text'] }}{% endif %}{% endfor %}" + OPEN,
    "parts of users": "{% for m in messages %}{% if m.role == 'user' %}[INST]" + TEXT_OF_PARTS + "[/INST]"
    "{% else %}{{ '<' + m.role + '>' + m.content + '</s>' }}{% endif %}{% endfor %}",
    "string or parts": TOOLS + "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    + TEXT_OF_PARTS + "{% endif %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}" + OPEN,
    # one developer message at the start, channels, calls with a recipient
    "developer": "{% if messages[0].role in ['developer', 'system'] %}<developer># Instructions {{ messages[0].content }}"
    "</end>{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% set ns = namespace(name='') %}"
    "{% for m in rest %}{% if m.role == 'user' %}<user>{{ m.content }}</end>{% elif m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% if m.content %}<assistant><analysis>{{ m.content }}</end>{% endif %}"
    "{% set ns.name = m.tool_calls[0].function.name %}<assistant to={{ ns.name }}>"
    "{{ m.tool_calls[0].function.arguments | tojson }}</call>{% else %}<assistant><final>{{ m.content }}</end>{% endif %}"
    "{% elif m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<{{ ns.name }} to=assistant>{{ m.content | tojson }}</end>{% endif %}{% endfor %}" + OPEN,
    "only developer": "{% for m in messages %}{% if m.role in ['developer', 'user', 'assistant'] %}<{{ m.role }}>"
    "{{ m.content }}{% endif %}{% endfor %}" + OPEN,
    # only the first system message
    "first system": "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endfor %}" + OPEN,
    # names of results, and of calls in `tools`
    "names": "{% for m in messages %}{% if m.role == 'tool' %}{{ '<result name=' + m.name + '>' }}{{ m.content }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{% set found = tools | "
    "selectattr('function.name', 'eq', c.function.name) | list if tools else [] %}{% if tools and not found %}"
    "{{ raise_exception('unknown tool') }}{% endif %}{{ c.function | tojson }}{% endfor %}{% endif %}{% endfor %}"
    + TOOLS + OPEN,
    # text before the end of reasoning is dropped, whatever the role
    "splits all": "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] | trim }}{% endfor %}" + OPEN,
    # only one argument of each call
    "one argument": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments.values() | first }}){% endfor %}{% endfor %}" + OPEN,
    "last turn": "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}Q: {{ messages[-1].content }} A:",
    # requires a variable, so nothing can be learned at start
    "guideline": "{% if not guideline %}{{ raise_exception('guideline is required') }}{% endif %}{{ guideline }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + OPEN,
    "cut": "{% for m in messages[-3:] %}{% if m.role in ['user', 'assistant', 'system'] %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}",
}  # fmt: skip
ALL_PARTS = frozenset({"user", "assistant", "system", "tool"})
ONLY_RESULTS = frozenset({"tool call"})
FORMS = {
    "chatml": TemplateForm(renders_tools=True),
    "branches": TemplateForm(renders_tools=True),
    "one call": TemplateForm(splits_calls=True, renders_tools=True),
    "no system": TemplateForm(unrendered=NO_INSTRUCTIONS | NO_CALLS),
    "system in user": TemplateForm(merges_instructions=True, unrendered=NO_CALLS),
    "system last": TemplateForm(merges_instructions=True, splits_calls=True, renders_tools=True),
    "none before calls": TemplateForm(call_content="null", arguments="json", splits_calls=True),
    "concatenated": TemplateForm(arguments="json"),
    "printed": TemplateForm(arguments="json"),
    "items": TemplateForm(renders_tools=True),
    "pythonic": TemplateForm(),
    "no content": TemplateForm(call_content="omitted", splits_calls=True),
    "parts": TemplateForm(part_roles=ALL_PARTS, unrendered=ONLY_RESULTS),
    "parts by filter": TemplateForm(part_roles=ALL_PARTS, unrendered=ONLY_RESULTS),
    "first part": TemplateForm(part_roles=ALL_PARTS, unrendered=ONLY_RESULTS),
    "parts of users": TemplateForm(part_roles=frozenset({"user"}), unrendered=ONLY_RESULTS),
    "string or parts": TemplateForm(renders_tools=True),
    "developer": TemplateForm(developer_role="developer", merges_instructions=True),
    "only developer": TemplateForm(system_role="developer", developer_role="developer", unrendered=NO_CALLS),
    "first system": TemplateForm(merges_instructions=True, unrendered=NO_CALLS),
    "names": TemplateForm(renders_tools=True),
    "splits all": TemplateForm(unrendered=ONLY_RESULTS),
    "one argument": TemplateForm(),
    "last turn": TemplateForm(merges_instructions=True, unrendered=NO_CALLS | {"assistant"}),
    "guideline": TemplateForm(),
    "cut": TemplateForm(unrendered=NO_CALLS),
}


def templates_of_transformers() -> dict[str, str]:
    """The chat templates in transformers' source files, which are texts that loop over `messages`."""
    folder = Path(transformers.__file__).parent / "models"
    found = {}
    for path in sorted(folder.glob("*/*.py")):
        source = path.read_text(encoding="utf-8")
        if "{%" not in source or "messages" not in source:
            continue
        for node in ast.walk(parse_source(source)):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and "{%" in text and "in messages" in text:
                found[f"{path.stem}:{node.lineno}"] = text
    return found
