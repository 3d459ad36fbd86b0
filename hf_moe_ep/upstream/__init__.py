"""Every name of torch, transformers, accelerate, peft and trl that is not public API.

Here: one file per topic, each function naming the upstream file that it leans on, and every
version check. When an upgrade breaks, this is the folder to read. Never: a decision of ours.
"""
