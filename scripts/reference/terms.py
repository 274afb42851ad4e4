"""The page of a robot's task: its keys, from the comments of configs/env/robot.yaml, and all terms of all lists."""

from types import ModuleType

from rlstable.config.defaults import config_dir
from rlstable.robot import commands, endings, observations, resets, rewards
from rlstable.robot.terms import needs_of, parameters_of
from scripts.pages import table
from scripts.reference.comments import comments_of, written

_INTRODUCTION = """# Terms of a robot's task

[Your robot](your_robot.md) shows how to use these terms.

A term is a function `(robot, data, past, action)`; a command or a reset is a function `(robot, key)`. The parameters
stand beside the term: `+env.task.rewards.height.width=0.2`. A list takes functions of your own, too:
`+env.task.rewards.lean={term: "my_package.my_module:lean", weight: -0.1}`.
"""
_LISTS: dict[str, tuple[ModuleType, str]] = {
    "Observations": (observations, "env.task.observations, env.task.critic_observations"),
    "Commands": (commands, "env.task.commands"),
    "Rewards": (rewards, "env.task.rewards"),
    "Endings": (endings, "env.task.endings"),
    "Resets": (resets, "env.task.reset"),
}


def page() -> str:
    parts = [_INTRODUCTION, "## Keys", "", *_keys(), ""]
    for title, (module, key) in _LISTS.items():
        first = (module.__doc__ or "").partition("\n")[0]
        parts += [f"## {title}", "", f"`{key}`: {first}", "", *_terms(module), ""]
    return "\n".join(parts)


def _keys() -> list[str]:
    comments = comments_of(config_dir() / "env" / "robot.yaml")
    rows = [(f"`{key}`", _escaped(text)) for key, text in comments.items() if key.startswith("env.task.") and text]
    return table(("key", "meaning"), rows, range(2))


def _terms(module: ModuleType) -> list[str]:
    rows = []
    for name, function in module.TERMS.items():
        parameters = ", ".join(
            f"`{key}`" if value is ... else f"`{key}: {written(value)}`"
            for key, value in parameters_of(function).items()
        )
        needs = ", ".join(need for need in needs_of(function) if need != "truncation")
        rows.append((f"`{name}`", _escaped(function.__doc__ or ""), parameters, needs))
    return table(("term", "meaning", "parameters", "needs"), rows, range(4))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
