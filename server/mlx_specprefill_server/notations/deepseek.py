"""DeepSeek's calls: V3 and its distillations write a name and JSON between marks, V3.2 and V4 tags."""

from __future__ import annotations

from ..parsers.call_parts import CALL, END_CALL
from ..parsers.json_calls import between_reader
from ..parsers.marked_calls import Marks, marked_reader
from ..parsers.tag_calls import Tags, tag_reader
from .declaration import Notation, Written

MARKS = Marks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
)
WRITTEN = f"{MARKS.call}{{name}}{MARKS.arguments}{{arguments}}{MARKS.end_call}"
DEEPSEEK = Notation(
    marks=((MARKS.section,),),
    # the distillations fall back to Qwen's notation
    readers=dict.fromkeys((MARKS.section, MARKS.call), marked_reader(MARKS))
    | {CALL: between_reader(CALL, END_CALL, known=True)},
    written=(Written(WRITTEN, "", MARKS.section, MARKS.end_section),),
    begun=(MARKS.call, MARKS.arguments),
    marked=True,
)

TAGS = Tags(
    "<｜DSML｜function_calls>", "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="', "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="', '">', lines=False,
    end_parameter="</｜DSML｜parameter>", kinds=(' string="true">', ' string="false">'),
)  # fmt: skip
TAGS_4 = TAGS._replace(call="<｜DSML｜tool_calls>", end_call="</｜DSML｜tool_calls>")
EITHER = {tags.call: tag_reader(tags) for tags in (TAGS, TAGS_4)}
DSML_4 = Notation(marks=(("｜DSML｜", "tool_calls>"),), readers=EITHER)
DSML = Notation(marks=(("｜DSML｜",),), readers=EITHER)
