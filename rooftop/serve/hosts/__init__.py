"""Engines over several processes or hosts: links, handover of KV pages, processes joined into one."""
