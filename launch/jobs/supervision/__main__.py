"""Run one attempt of a job: the last command of every batch script."""

from launch.jobs.supervision.supervisor import main

main()
