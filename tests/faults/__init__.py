"""Faults by seeded schedules: processes are killed and stopped, disks fill up and lose power, bits flip."""
