# What the Python package carries: liblockstep.so and the command, which need nothing of a machine but its C library. They
# are made of the libraries of this build, with everything else linked in, and without MPI and SentencePiece.
set(portable_libraries wire files net comm flight server model data train report page launch run doctor base)
set(LOCKSTEP_PORTABLE OFF)
find_library(SODIUM_ARCHIVE libsodium.a)
find_library(CRYPTO_ARCHIVE libcrypto.a)
if(SODIUM_ARCHIVE AND CRYPTO_ARCHIVE AND NOT LOCKSTEP_SANITIZE AND NOT LOCKSTEP_CUDA_FOUND AND NOT LOCKSTEP_SYNTAX_ONLY)
  set(LOCKSTEP_PORTABLE ON)
endif()
# Without optimisation clang makes only one of the two destructors of an inline class, of fmt's errors the one that is not called.
if(CMAKE_CXX_COMPILER_ID STREQUAL Clang AND CMAKE_BUILD_TYPE STREQUAL Debug)
  set(LOCKSTEP_PORTABLE OFF)
endif()
set(LOCKSTEP_PORTABLE ${LOCKSTEP_PORTABLE} PARENT_SCOPE)
if(NOT LOCKSTEP_PORTABLE)
  return()
endif()

lockstep_library(without_others SOURCES without/mpi.cc without/sentencepiece.cc without/fmt.cc LINK lockstep_comm lockstep_data)
set_target_properties(lockstep_without_others PROPERTIES UNITY_BUILD OFF)
list(TRANSFORM portable_libraries PREPEND lockstep_)
list(APPEND portable_libraries lockstep_without_others)
set_property(GLOBAL PROPERTY LOCKSTEP_PORTABLE_LIBRARIES ${portable_libraries})

# lockstep_portable(TARGET): links everything into it that it needs.
function(lockstep_portable target)
  get_property(portable_libraries GLOBAL PROPERTY LOCKSTEP_PORTABLE_LIBRARIES)
  set(archives)
  foreach(library ${portable_libraries})
    list(APPEND archives $<TARGET_FILE:${library}>)
  endforeach()
  add_dependencies(${target} ${portable_libraries})
  set_target_properties(${target} PROPERTIES LINK_DEPENDS "${archives}")
  target_link_libraries(${target} PRIVATE -Wl,--start-group ${archives} -Wl,--end-group
    ${SODIUM_ARCHIVE} ${CRYPTO_ARCHIVE} Threads::Threads ${CMAKE_DL_LIBS})
  target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc -Wl,--gc-sections -Wl,--as-needed -Wl,-z,defs)
endfunction()

# Only the functions of lockstep/c.h can be seen from outside.
set(exports ${CMAKE_SOURCE_DIR}/cmake/liblockstep.map)
add_library(lockstep_shared SHARED $<TARGET_OBJECTS:lockstep_c>)
lockstep_portable(lockstep_shared)
target_link_options(lockstep_shared PRIVATE -Wl,--version-script=${exports} -Wl,--exclude-libs,ALL)
set_target_properties(lockstep_shared PROPERTIES OUTPUT_NAME lockstep SOVERSION 1 LINKER_LANGUAGE CXX
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
