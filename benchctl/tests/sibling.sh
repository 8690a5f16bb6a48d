#!/bin/sh
# Stands for benchd or benchsim in cli.rs. Kept here, since a program that a test has just written can be "busy".
eval "$SIBLING_SCRIPT"
