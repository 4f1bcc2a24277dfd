# Puts the whole library ahead of the objects of `target`, a program of code that is not optimised. Templates and inline
# functions are in both, and the linker takes the first: that of the library, optimised and with all checks of a sanitizer.
function(lockstep_library_first target)
  set(archives ${LOCKSTEP_LIBRARIES} ${ARGN})
  list(TRANSFORM archives REPLACE "(.+)" "$<TARGET_FILE:\\1>")
  list(JOIN archives " " archives)
  target_link_options(${target} PRIVATE "SHELL:-Wl,--whole-archive ${archives} -Wl,--no-whole-archive")
endfunction()
