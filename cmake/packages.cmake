# The target `packages`: lockstep.deb with the command and liblockstep.so, lockstep-dev.deb with what programs are built with,
# and a tarball of the command that needs nothing of a machine but its C library.
set(CPACK_PACKAGE_VENDOR "The Lockstep authors")
set(CPACK_PACKAGE_CONTACT "The Lockstep authors <lockstep@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
set(CPACK_PACKAGE_CHECKSUM SHA256)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
  OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_PROJECT_CONFIG_FILE ${CMAKE_SOURCE_DIR}/cmake/cpack_generator.cmake)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_SOURCE_DIR}/cmake/cpack_staged.cmake)
# What is packed is built before; nothing else need be.
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_LOCKSTEP_PACKAGE_NAME lockstep)
set(CPACK_DEBIAN_LOCKSTEP_PACKAGE_SECTION science)
set(CPACK_DEBIAN_LOCKSTEP_DESCRIPTION "The weights have the same bits at any number of workers, over threads, shared
memory, TCP, MPI or a gradient server. Workers may die, leave or join meanwhile.
This is the command, and the library with the C interface.")
set(CPACK_DEBIAN_LOCKSTEP_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_LOCKSTEP_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_LOCKSTEP_PACKAGE_SUGGESTS "openssh-client, openmpi-bin")
set(CPACK_DEBIAN_LOCKSTEP-DEV_PACKAGE_NAME lockstep-dev)
set(CPACK_DEBIAN_LOCKSTEP-DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_LOCKSTEP-DEV_DESCRIPTION "Headers and static libraries for find_package(lockstep), and lockstep/c.h with
liblockstep.so for programs in C.")

# The packages that own these files of this machine, as the caller's variable `result`. What no package has is left out.
function(packages_of result)
  set(owners)
  foreach(file ${ARGN})
    execute_process(COMMAND ${DPKG_QUERY} --search ${file} OUTPUT_VARIABLE owner ERROR_QUIET)
    if(owner MATCHES "^([^:, ]+)")
      list(APPEND owners ${CMAKE_MATCH_1})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES owners)
  set(${result} ${owners} PARENT_SCOPE)
endfunction()

find_program(DPKG_QUERY dpkg-query)
if(DPKG_QUERY)
  # NVIDIA's packages do not tell dpkg-shlibdeps what they have.
  set(foreign)
  foreach(library ${CUDA_cublasLt_LIBRARY} ${CUDNN_LIBRARY} ${NCCL_LIBRARY})
    file(REAL_PATH ${library} library)
    list(APPEND foreign ${library})
  endforeach()
  packages_of(needed ${foreign})
  list(JOIN needed ", " CPACK_DEBIAN_LOCKSTEP_PACKAGE_DEPENDS)
  # The static libraries name what they are linked with; its packages follow from what this build has found.
  packages_of(needed ${SODIUM_LINK_LIBRARIES} ${CRYPTO_LINK_LIBRARIES} ${SENTENCEPIECE_LINK_LIBRARIES} ${${LOCKSTEP_MPI_CHOICE}_LIBRARY}
    ${CUDA_cudart_static_LIBRARY} ${CUDA_cublasLt_LIBRARY} ${CUDNN_LIBRARY} ${NCCL_LIBRARY})
  list(PREPEND needed "lockstep (= ${PROJECT_VERSION})" libfmt-dev pkg-config)
  list(JOIN needed ", " CPACK_DEBIAN_LOCKSTEP-DEV_PACKAGE_DEPENDS)
endif()

include(CPack)
cpack_add_component(command GROUP lockstep)
cpack_add_component(share GROUP lockstep)
cpack_add_component(dev GROUP lockstep-dev)
cpack_add_component(portable)

set(pack ${CMAKE_CPACK_COMMAND} -G DEB)
if(TARGET lockstep_portable)
  set(pack ${pack} COMMAND ${CMAKE_CPACK_COMMAND} -G TGZ)
endif()
add_custom_target(packages USES_TERMINAL WORKING_DIRECTORY ${CMAKE_BINARY_DIR} VERBATIM
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${CPACK_PACKAGE_DIRECTORY}
  COMMAND ${pack}
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${CPACK_PACKAGE_DIRECTORY}/_CPack_Packages)
add_dependencies(packages lockstep ${LOCKSTEP_LIBRARIES})
if(TARGET lockstep_portable)
  add_dependencies(packages lockstep_shared lockstep_portable)
endif()
